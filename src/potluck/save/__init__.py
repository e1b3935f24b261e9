"""Where a run stands, kept on disks and in stores."""
