"""What the benchmarks with `--device cuda` run: kernels, whole steps, a whole mesh, and peers."""
