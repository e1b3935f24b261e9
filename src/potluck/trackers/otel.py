"""OpenTelemetry: each number is a gauge, exported as OTLP over HTTP. OTEL_EXPORTER_OTLP_ENDPOINT is its own."""

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from potluck.trackers.known import Ended, TrackedRun


class _Otel:
    def __init__(self, reader: MetricReader | None = None) -> None:
        """`reader`: who asks for the numbers, if not the exporter."""
        self._reader = reader
        self._gauges: dict[str, Any] = {}

    def start(self, run: TrackedRun) -> str:
        reader = self._reader or _exporting()
        told = Resource.create({"service.name": "potluck", "potluck.run": run.name, "potluck.id": run.id_to_use()})
        self._provider = MeterProvider([reader], resource=told)
        self._meter = self._provider.get_meter("potluck")
        return ""

    def log(self, step: int, time_s: float, scalars: dict[str, float]) -> None:
        for name, value in {"train/step": float(step), **scalars}.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                gauge = self._gauges[name] = self._meter.create_gauge(f"potluck.{name.replace('/', '.')}")
            gauge.set(value)

    def finish(self, how: Ended) -> None:
        self._provider.shutdown()


def _exporting() -> MetricReader:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return PeriodicExportingMetricReader(OTLPMetricExporter())


make = _Otel
