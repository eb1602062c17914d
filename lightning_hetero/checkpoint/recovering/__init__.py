"""From what the tiers hold to a rank's state, whatever the plan and the ranks are now.

In the order of a recovery: `recovery` tells it from top to bottom, `session` and `inventory` say
what there is and which checkpoint it is to be, `assembly` which bytes a rank needs, `fetching` who
reads them, and gets them.
"""
