"""Stands for a benchmark in steps: it measures one thing, and then ends, fails, or waits until it is stopped."""

import sys
import time

print('{"one": {"ms": 1.5}}', flush=True)
print('{"two": {"ms', flush=True)
if sys.argv[1] == "fails":
    sys.exit("1 failed: two: no kernel")
if sys.argv[1] == "waits":
    time.sleep(3600)
