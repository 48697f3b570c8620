"""What `bench/gpu_suite.py` runs: one file for measuring, one for results, one for each group of cases."""
