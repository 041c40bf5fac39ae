"""A port that a program starts a server on is that program's alone."""

import random
import subprocess
import sys

from testing.processes import free_port

SEED = 7
CHOOSES = f"import random; from testing.processes import free_port; random.seed({SEED}); print(free_port())"


def test_a_port_is_given_once_while_its_receiver_runs() -> None:
    """All choose by the same numbers: without the others, each would get the same port."""
    random.seed(SEED)
    ours = {free_port()}
    random.seed(SEED)
    ours.add(free_port())
    done = subprocess.run([sys.executable, "-c", CHOOSES], capture_output=True, text=True, check=True)
    assert len({*ours, int(done.stdout)}) == 3
