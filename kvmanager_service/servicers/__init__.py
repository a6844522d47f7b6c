"""The gRPC face of the manager. A method checks, calls, maps the error and fills; it decides nothing."""
