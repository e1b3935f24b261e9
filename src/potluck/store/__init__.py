"""Objects of one run, in a folder or a bucket that its workers share."""
