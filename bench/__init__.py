"""One script for each published figure.

Each measures its peers in the same run, interleaved, and prints medians and ratios.
"""
