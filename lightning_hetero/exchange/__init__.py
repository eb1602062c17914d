"""Decide who owns, who holds, and what moves between ranks: arithmetic alone, without torch.

Read in this order: `slices` (parameters, and the pieces into which owners divide them), `owners`
(which rank owns which piece; `owner_shares` if ranks own in proportion to their memory), `holders`
(which ranks compute with which rows under a plan), `transfers` (what pull and push move), and
`neighbours` (which rank of a stage sends activations to which rank of the next).
`lightning_hetero.runtime.exchange` carries these tables out, `lightning_hetero.simulator.exchange`
predicts their time. Import names from these modules.
"""
