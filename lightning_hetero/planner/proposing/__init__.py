"""Propose plans for data of varying lengths (Hydraulis §7).

Read in this order: `candidate_plans` (what is proposed for a cluster), `proposal` (how many
pipelines of each scheme), `schemes` (how good candidates could be at most), `pipeline_costs` (what
a plan's pipelines cost an assignment).
"""
