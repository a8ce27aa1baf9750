create database if not exists slurm_acct_db;
create user if not exists slurm@localhost identified via unix_socket;
grant all on slurm_acct_db.* to slurm@localhost;
