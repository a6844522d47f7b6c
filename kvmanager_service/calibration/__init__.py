"""What a step costs on a real executor, measured: the cost model that a replay reckons with.

    python -m kvmanager_service.calibration HOST:PORT -o cost.json      (or: kvplane calibrate HOST:PORT -o cost.json)

Station: beside the service. `shapes` chooses steps that tell the terms apart, `measurement` has the executor run them,
`fit` finds the terms, `report` writes down what `replay.cost_model` reads. No request, no scheduler, no model here.
"""
