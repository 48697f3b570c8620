"""The code behind `bench/gpu_suite.py`: one file for measuring, one for results, one for each group of cases."""
