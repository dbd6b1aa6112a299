# Two images: without PyTorch (extract, convert, inspect, insert, upload, bench), and with it (validate, tune, doctor too).
#
#   docker build --target core -t mtp-extract .
#   docker build --target validate -t mtp-extract:validate .
#   docker run --rm -v "$PWD:/work" mtp-extract extract --sample
#
# The folder that is mounted has to be writable for uid 1000; --user "$(id -u)" makes it another.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim AS core
# What is kept between runs (the Hub's files, matplotlib's fonts) lies where every user may write.
ENV HOME=/tmp/home
RUN useradd --no-create-home --home-dir "$HOME" --uid 1000 mtp \
    && install --directory --mode 1777 "$HOME" \
    && install --directory --owner mtp /work
COPY constraints.txt /usr/local/share/mtp-extract/
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir -c /usr/local/share/mtp-extract/constraints.txt /wheels/*.whl
USER mtp
WORKDIR /work
ENTRYPOINT ["mtp"]

FROM core AS validate
USER root
# An index with PyTorch for the CPU alone saves gigabytes: --build-arg TORCH_INDEX=ADDRESS.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir -c /usr/local/share/mtp-extract/constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$(echo /wheels/*.whl)[validate]"
USER mtp
