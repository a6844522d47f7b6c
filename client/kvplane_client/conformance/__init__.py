"""The conformance kit: tries over gRPC whether an executor, in any language, keeps the contract.

`kvplane conformance HOST:PORT` runs it. It speaks the wire alone and imports nothing else of the client: `cases` has a
file for each topic, `bench` what cases are written with, `judges` what outputs should have been.
"""
