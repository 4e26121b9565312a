# The server in a container: docker build -t laneformer . && docker run -p 8000:8000 -v "$PWD/model:/model" laneformer
# docs/release.md: what it holds, and how its commands are tested where no container runs.
FROM debian:trixie-slim AS build
RUN apt-get update -q && apt-get install -qy --no-install-recommends g++ python3-dev python3-venv ca-certificates
COPY CMakeLists.txt pyproject.toml README.md LICENSE /src/
COPY models /src/models
RUN python3 -m venv /build && /build/bin/pip wheel -q --no-deps -w /wheels /src

FROM debian:trixie-slim
RUN apt-get update -q && apt-get install -qy --no-install-recommends python3-venv ca-certificates && rm -rf /var/lib/apt/lists
COPY --from=build /wheels /wheels
RUN python3 -m venv /opt/laneformer && /opt/laneformer/bin/pip install -q --no-cache-dir "$(echo /wheels/*.whl)[serve,grammar,gguf]"
ENV PATH=/opt/laneformer/bin:/usr/local/bin:/usr/bin:/bin
ENV XDG_CACHE_HOME=/tmp
USER nobody
EXPOSE 8000
ENTRYPOINT ["laneformer"]
CMD ["serve", "/model", "--host", "0.0.0.0"]
