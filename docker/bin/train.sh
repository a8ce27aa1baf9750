#!/bin/bash
# A job as alice and bob submit it: sbatch train.sh
#SBATCH --job-name=train-bert-100
#SBATCH --gpus=4
#SBATCH --constraint=gpu&hbm80g
#SBATCH --time=10
gpu-work 18 40
