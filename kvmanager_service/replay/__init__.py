"""Replay of a request trace through the very core that serves live traffic, on a simulated clock.

    python -m kvmanager_service.replay TRACE --num-blocks N        (or: kvplane replay TRACE --num-blocks N)

Station: beside the service, above `core`; it knows no wire. `trace` reads, `cost_model` says how long a step takes,
`timed` and `one_at_a_time` run, `report` and `plot` show.
"""
