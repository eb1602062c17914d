"""Decide which rank owns, holds, sends and receives which rows: arithmetic alone, without torch.

Read in this order: `slices` (parameters, and the pieces into which owners divide them), `owners`
(which rank owns which piece; `owner_shares` if ranks own in proportion to their memory), `holders`
(which ranks compute with which rows under a plan), `transfers` (what pull and push move), and
`neighbours` (which rank of a stage sends activations to which rank of the next).
`lightning_hetero.runtime.exchange` executes these tables, `lightning_hetero.simulator.exchange`
predicts their time. Import names from these modules.
"""
