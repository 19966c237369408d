"""A real OTLP receiver (gRPC and HTTP) that keeps the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver:
    """A receiver of spans.

    Attributes:
        grpc_url: Accepts exports over gRPC.
        http_url: Accepts exports over HTTP.
        spans: Received spans.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        """Start the receiver.

        Args:
            host: The address to listen on; 0.0.0.0 for senders in containers.
        """
        self.spans: list[tuple[str, Span]] = []
        self._arrived = threading.Condition()
        receiver = self

        class Service(trace_service_pb2_grpc.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                receiver._take(request)
                return trace_service_pb2.ExportTraceServiceResponse()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = trace_service_pb2.ExportTraceServiceRequest()
                request.ParseFromString(self.rfile.read(int(self.headers["content-length"])))
                receiver._take(request)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self._grpc = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Service(), self._grpc)  # type: ignore[no-untyped-call]  # generated code
        self.grpc_port = self._grpc.add_insecure_port(f"{host}:0")
        self.grpc_url = f"http://127.0.0.1:{self.grpc_port}"
        self._grpc.start()
        self._http = ThreadingHTTPServer((host, 0), Handler)
        self.http_url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def _take(self, request: Any) -> None:
        with self._arrived:
            for resource in request.resource_spans:
                service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
                self.spans += [(service, span) for scope in resource.scope_spans for span in scope.spans]
            self._arrived.notify_all()

    def wait_for(self, name: str, wanted: Callable[[Span], bool] = lambda s: True, within: float = 60.0) -> Span:
        """Return the first such span."""
        with self._arrived:
            found = self._arrived.wait_for(lambda: next((s for _, s in self.spans if s.name == name and wanted(s)), None), within)
        assert found is not None, f"no span {name!r} within {within} s; there are {sorted({s.name for _, s in self.spans})}"
        return found

    def close(self) -> None:
        self._grpc.stop(None)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
