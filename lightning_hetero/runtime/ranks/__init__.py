"""Ranks and what connects them: process groups, their connections, heartbeats, failures.

The threads of a process, each with its owner, which starts it and waits for its end:

- *heartbeat* (`heartbeat.Heartbeat`, from `begin` to `end`): the only one that calls the store
  while others wait in collectives,
- *failure-detector* (`failure.FailureDetector`, from `start` to `pause`): judges what that one has
  heard, and ends a process whose main thread can't; its *abort* ends waits in communicators, and
  `pause` waits for it,
- *new connections* (`connections.Connections.open`): makes a group where a rank may be lost at that
  moment; `open` waits for it, but leaves it where connections are closed: gloo's wait has no end,
- *keeper-store* (`generation.keeper.Keeper`): only in a keeper's process, which ends with
  `os._exit`,
- *assignments* (`data.ahead`), *recording* (`straggler.recording`) and contingency plans
  (`autoplan.jobs`): beside training, ended by their owners' `close` or `stop`,
- those whose names begin with *checkpoint-* (`checkpoint.deadlines.BackgroundThread`, and the
  lease in `checkpoint.claims`) and *preemption-notice* (`checkpoint.notices`).
"""
