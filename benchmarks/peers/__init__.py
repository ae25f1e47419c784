"""Other people's fault tolerance, run on the same work as ours: the yardsticks of `benchmarks`."""
