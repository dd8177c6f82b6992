: "${MODEL:?set MODEL: the hub id that the trainer names}"
: "${DELTAWIRE_RUN:?set DELTAWIRE_RUN: the run to follow, such as hf://buckets/me/wordle}"
: "${DELTAWIRE_TOKEN:?set the secret DELTAWIRE_TOKEN: a long random string}"
# `exec`, so that the server itself is told when the container is to end; VLLM_ARGS is several words
# shellcheck disable=SC2086
exec deltawire serve --engine vllm "$MODEL" --run "$DELTAWIRE_RUN" --host 0.0.0.0 --port "${PORT:-7860}" -- ${VLLM_ARGS:-}
