# mtp-extract, without PyTorch; with EXTRA=validate also what validates and tunes.
#
#   docker build -t mtp-extract .
#   docker build --build-arg EXTRA=validate -t mtp-extract:validate .
#   docker run --rm -v "$PWD:/work" mtp-extract extract --sample
#
# The folder that is mounted has to be writable for uid 1000; --user "$(id -u)" makes it another.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim
ARG EXTRA=
# An index with PyTorch for the CPU alone saves gigabytes: --build-arg TORCH_INDEX=ADDRESS.
ARG TORCH_INDEX=
# What is kept between runs (the Hub's files, matplotlib's fonts) lies where every user may write.
ENV HOME=/tmp/home
RUN useradd --no-create-home --home-dir "$HOME" --uid 1000 mtp \
    && install --directory --mode 1777 "$HOME" \
    && install --directory --owner mtp /work
COPY . /src
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \
    "/src${EXTRA:+[$EXTRA]}"
USER mtp
WORKDIR /work
ENTRYPOINT ["mtp"]
