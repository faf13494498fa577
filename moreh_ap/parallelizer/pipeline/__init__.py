"""Pipeline parallelism: which blocks a stage holds, and PyTorch's schedules over the stages."""
