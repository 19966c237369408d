"""One script for each published figure.

Each measures its peers in the same run, interleaved, and prints medians and ratios.
"""

import sys

from bench.termination import end_on_sigterm

if sys.argv[:1] == ["-m"]:  # `python -m bench.…` is looking for its module; a test or a service imports this otherwise
    end_on_sigterm()
