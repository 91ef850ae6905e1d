# paceline serve in a container; docs/deploy.md says how to run it.
#
#   docker build -t paceline .                               for a CPU
#   docker build -t paceline:cuda --build-arg VARIANT=cuda . for NVIDIA GPUs
ARG VARIANT=cpu

FROM python:3.12-slim-bookworm AS base
ENV PYTHONUNBUFFERED=1 UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1
RUN pip install --no-cache-dir uv

FROM base AS cpu
ENV TORCH_BACKEND=cpu EXTRAS=

FROM base AS cuda
ENV TORCH_BACKEND=cu130 EXTRAS=[cuda]
# torch brings CUDA's libraries; Triton compiles its launchers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

FROM ${VARIANT}
WORKDIR /opt/paceline
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN uv pip install --torch-backend="$TORCH_BACKEND" -c constraints.txt ".$EXTRAS"

RUN useradd --create-home --uid 10001 paceline
USER paceline
WORKDIR /home/paceline
# Models that are fetched, and kernels that are compiled: a volume keeps both.
VOLUME /home/paceline/.cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["paceline", "serve", "--host", "0.0.0.0", "--port", "8000"]
CMD ["bundled"]
