"""Parts of `StragglerMonitor`: what a step took, what can be done, and who decides."""
