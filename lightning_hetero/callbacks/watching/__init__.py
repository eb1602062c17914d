"""Parts of `StragglerMonitor`: how long a step took, which mitigations exist, who decides."""
