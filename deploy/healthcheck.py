"""Asks a gRPC server's health service once: `python healthcheck.py HOST:PORT [SERVICE]`, exit 0 when it is SERVING.

The health check of both images. It runs in its own process every few seconds, so it imports only grpc and the
generated health stubs.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Checks `argv` = [target, service = "": the whole server] and says on stderr what is wrong, if anything is."""
    target, service = [*argv, ""][:2]
    with grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S, wait_for_ready=True)
        except grpc.RpcError as error:
            print(f"{target}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        print(f"{target}: {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
