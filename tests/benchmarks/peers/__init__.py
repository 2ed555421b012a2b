"""The systems that `bench_peers` runs side by side, one module each."""
