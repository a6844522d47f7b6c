"""The pure core: block pool, prefix hashes, admission, scheduling, preemption, finish.

It imports no grpc and no torch, reads no clock and opens no file: time and ids are arguments. So the same code serves
live traffic, replays a trace and runs under a deterministic simulation.
"""
