"""Records of squeue's fixed-width text, as the tests make them."""

from __future__ import annotations

from slurm.running import _FIELDS

# As Debian's 22.05.8 printed them for `sbatch --gpus=2 --array=1-2`, with the widths of _FIELDS.
JOB = {
    "JobID": "5", "SubmitTime": "1795877270", "RestartCnt": "0", "ArrayJobID": "2", "ArrayTaskID": "1",
    "UserName": "alice", "Account": "ml", "Partition": "all", "NumNodes": "1", "StartTime": "1795877271",
    "EndTime": "1795880871", "TimeLimit": "1:00:00", "BatchFlag": "1",
    "tres-alloc": "cpu=1,mem=1000M,node=1,billing=1,gres/gpu=2,gres/gpu:a100=2", "NodeList": "n1", "Name": "train",
    "Comment": "(null)", "HetJobID": "N/A", "HetJobOffset": "N/A",
}  # fmt: skip


def squeue_record(**fields: str | bytes) -> bytes:
    """A record as squeue prints it, of JOB with other fields; tres_alloc is tres-alloc."""
    parts = []
    for name, size in _FIELDS.items():
        value = fields.get(name.replace("-", "_"), JOB[name])
        text = value.encode() if isinstance(value, str) else value
        parts.append(text[:size].ljust(size))
    return b"".join(parts) + b"\n"
