"""GPUs under MIG: the schemes of migm-mig-scheduling, and clusters whose layouts change."""
