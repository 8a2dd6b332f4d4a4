# Two images. `docker build --target cpu .` is the small one, for machines without a GPU. The last stage, `gpu`, is what
# `docker build .` and Hugging Face Spaces build: it runs on NVIDIA GPUs and, slower, without one. docs/deploy.md says how
# to run them. Both write to /cache and /tmp alone, run as uid 1000 and answer at port 7860.
#
# vLLM's image brings CUDA and, in its own Python (/usr/bin/python3), vLLM, which is left as it is: its pins contradict
# Gradio 5's, so Hark has an environment of its own, /opt/venv.
ARG CPU_BASE=python:3.11-slim-bookworm
ARG GPU_BASE=vllm/vllm-openai:v0.32.0

# --- the source, the same for both -----------------------------------------------------------------------------------

FROM scratch AS source
COPY pyproject.toml README.md LICENSE /
COPY app /app
COPY streaming /streaming
COPY models /models

# --- cpu --------------------------------------------------------------------------------------------------------------

# hadolint ignore=DL3006
FROM ${CPU_BASE} AS cpu-build
WORKDIR /opt/hark
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --from=source /pyproject.toml ./
# The libraries first, in a layer that lasts until pyproject.toml changes. FastRTC names librosa, whose compilers and
# scientific libraries nothing here calls: librosa loads them only when it is asked to compute.
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["cpu"], sep="\n")' >/tmp/requirements.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --requirement /tmp/requirements.txt \
    && /opt/venv/bin/pip uninstall --yes numba llvmlite scipy scikit-learn joblib threadpoolctl
COPY --from=source / ./
# In place, not into the environment: the engine process starts in the directory that holds `models`, and must find
# there no libraries that are meant for another interpreter.
RUN /opt/venv/bin/pip install --no-deps --editable . \
    && python3 -m compileall -q app streaming models
# Models to put into the image, such as "base small"; without any they are fetched at the first start.
ARG BAKE_MODELS=""
ENV HARK_CACHE_DIR=/cache/hark HF_HOME=/cache/huggingface
# hadolint ignore=SC2086
RUN mkdir -p /cache/hark /cache/huggingface \
    && if [ -n "$BAKE_MODELS" ]; then /opt/venv/bin/hark fetch $BAKE_MODELS; fi

# hadolint ignore=DL3006
FROM ${CPU_BASE} AS cpu
COPY --from=cpu-build /opt/venv /opt/venv
COPY --from=cpu-build /opt/hark /opt/hark
COPY --from=cpu-build --chown=1000:1000 /cache /cache
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    GRADIO_ANALYTICS_ENABLED=False \
    HF_HOME=/cache/huggingface \
    HARK_CACHE_DIR=/cache/hark \
    HARK_HOST=0.0.0.0 \
    HARK_PORT=7860
WORKDIR /opt/hark
USER 1000:1000
EXPOSE 7860
STOPSIGNAL SIGTERM
# Readiness, not mere life: 200 once the engine has transcribed a known sentence rightly.
HEALTHCHECK --interval=30s --timeout=6s --start-period=10m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; service = http.client.HTTPConnection('127.0.0.1', int(os.environ['HARK_PORT']), timeout=4); service.request('GET', '/readyz'); sys.exit(service.getresponse().status != 200)"]
CMD ["hark", "serve"]

# --- gpu --------------------------------------------------------------------------------------------------------------

# hadolint ignore=DL3006
FROM ${GPU_BASE} AS gpu-build
WORKDIR /opt/hark
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --from=source /pyproject.toml ./
RUN python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["cpu"], sep="\n")' >/tmp/requirements.txt \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --requirement /tmp/requirements.txt \
    && /opt/venv/bin/pip uninstall --yes numba llvmlite scipy scikit-learn joblib threadpoolctl
# CTranslate2's wheel is built for CUDA 12 and loads cuBLAS by name when it finds a GPU. It has no other need of CUDA's
# libraries, cuDNN included (4.8.5, by its symbols). The image may have another CUDA; this does not touch it.
RUN /opt/venv/bin/pip install "nvidia-cublas-cu12==12.9.*"
COPY --from=source / ./
RUN /opt/venv/bin/pip install --no-deps --editable . \
    && python3 -m compileall -q app streaming models
ARG BAKE_MODELS=""
# The engine that they are for: vLLM reads another layout.
ARG HARK_ENGINE=ctranslate
ENV HARK_CACHE_DIR=/cache/hark HF_HOME=/cache/huggingface
# hadolint ignore=SC2086
RUN mkdir -p /cache/hark /cache/huggingface \
    && if [ -n "$BAKE_MODELS" ]; then /opt/venv/bin/hark fetch $BAKE_MODELS; fi

# hadolint ignore=DL3006
FROM ${GPU_BASE} AS gpu
COPY --from=gpu-build /opt/venv /opt/venv
COPY --from=gpu-build /opt/hark /opt/hark
COPY --from=gpu-build --chown=1000:1000 /cache /cache
# Found last, after what a library brings for itself: vLLM's own cuBLAS stays vLLM's.
RUN dirname "$(find /opt/venv -name libcublas.so.12)" >/etc/ld.so.conf.d/hark.conf && ldconfig
# For HARK_ENGINE=vllm, whose interpreter is the image's own: the one library of Hark's engine that vLLM does not need itself.
RUN PIP_BREAK_SYSTEM_PACKAGES=1 /usr/bin/python3 -m pip install --no-cache-dir --no-deps "soxr>=0.5,<2"
ENV PATH=/opt/venv/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    GRADIO_ANALYTICS_ENABLED=False \
    HF_HOME=/cache/huggingface \
    HARK_CACHE_DIR=/cache/hark \
    HARK_HOST=0.0.0.0 \
    HARK_PORT=7860
WORKDIR /opt/hark
USER 1000:1000
EXPOSE 7860
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=6s --start-period=10m --start-interval=5s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; service = http.client.HTTPConnection('127.0.0.1', int(os.environ['HARK_PORT']), timeout=4); service.request('GET', '/readyz'); sys.exit(service.getresponse().status != 200)"]
ENTRYPOINT []
CMD ["hark", "serve"]
