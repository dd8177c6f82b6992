# `exec`, so that the server itself is told when the container is to end
exec deltawire env wordle --host 0.0.0.0 --port "${PORT:-7860}" --words "${WORDS:-scowl-20}" \
    --guesses "${GUESSES:-6}" --max-sessions "${MAX_SESSIONS:-512}" --json
