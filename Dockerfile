# CPU:  docker build --target cpu  --build-arg TORCH_INDEX=URL -t potluck:cpu .   (URL: an index of CPU builds of torch)
# CUDA: docker build --target cuda -t potluck:cuda .   (torch brings CUDA's libraries, the machine its driver)
#
#   docker run --rm potluck:cpu doctor
#   docker run --rm -v ./invite:/run/potluck/invite:ro potluck:cpu join /run/potluck/invite
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:${PYTHON}-slim AS base
RUN useradd --uid 1000 --create-home potluck
COPY constraints.txt /tmp/constraints.txt
ENV PYTHONUNBUFFERED=1

FROM base AS cuda
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt torch
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/wheel/*.whl
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER potluck
WORKDIR /home/potluck
ENTRYPOINT ["potluck"]
CMD ["--help"]

FROM base AS cpu
ARG TORCH_INDEX
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url \
    "${TORCH_INDEX:?Name an index of CPU builds of torch: --build-arg TORCH_INDEX=URL}" torch
COPY --from=wheel /wheel /tmp/wheel
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt /tmp/wheel/*.whl
USER potluck
WORKDIR /home/potluck
ENTRYPOINT ["potluck"]
CMD ["--help"]
