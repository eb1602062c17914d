"""From what the tiers hold to a rank's state, whatever the plan and the ranks are now.

`recovery` restores what is in files, `live` what ranks still hold in memory. For both, `assembly`
says which bytes a rank needs, and `fetching` gets them from their cheapest sources. `inventory`
says what the tiers hold and which checkpoint it is to be.
"""
