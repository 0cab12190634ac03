# Prints once a second how many bytes Postmark has read and written in all, until it ends.
pid=$(pgrep -x postmark)
while sleep 1; do
    awk '/^[rw]char/ { bytes += $2 } END { printf "bytes %.0f\n", bytes }' "/proc/$pid/io" || exit
done
