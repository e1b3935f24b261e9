"""The last that the fork server loads: what it has loaded stays, and what its children compile is kept."""

import gc
import sys

gc.freeze()  # a collection in a rank would look at all of torch, and so copy its pages
sys.dont_write_bytecode = False
