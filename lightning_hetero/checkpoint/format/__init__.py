"""The files of a rank's part of a checkpoint, and the state that they hold."""
