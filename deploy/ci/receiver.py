"""Stands in for the OpenTelemetry collector: takes spans over OTLP gRPC on port 4317 and prints a JSON line for each."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]  # the stubs have no types
    """Knows of a span its trace, its name and whose it is."""

    def Export(self, request, context):  # type: ignore[no-untyped-def]  # noqa: ARG002  # gRPC's name and arguments
        """One batch of one service."""
        for part in request.resource_spans:
            service = next((a.value.string_value for a in part.resource.attributes if a.key == "service.name"), "")
            for span in (span for scope in part.scope_spans for span in scope.spans):
                print(json.dumps({"trace": span.trace_id.hex(), "span": span.name, "service": service}), flush=True)
        return trace_service_pb2.ExportTraceServiceResponse()


def main() -> None:
    """Serves until it is killed."""
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Receiver(), server)
    server.add_insecure_port("0.0.0.0:4317")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
