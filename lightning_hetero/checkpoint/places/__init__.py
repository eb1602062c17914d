"""The places where checkpoints are kept: what they hold, who may write there, what goes."""
