"""Updates: from folders of samples and of a checkpoint to the folder of the next checkpoint."""
