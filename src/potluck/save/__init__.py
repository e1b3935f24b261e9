"""Where a run stands, kept on disks, in stores and in the memory of a neighbour."""
