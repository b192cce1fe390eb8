"""Files and folders that outlive kills and that several processes share."""
