"""What a worker tells the scheduler's process, through a pipe, of an image whose rows it saved."""

import struct

RECORD = struct.Struct("<Q?")
"""The number of the save, and whether its rows are there. Written and read whole."""
