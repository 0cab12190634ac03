# Adds one row after the other to the guest's database, and keeps the number of the last one that
# the database has acknowledged.
set -e
sql() { psql --no-psqlrc --quiet --tuples-only --no-align --set ON_ERROR_STOP=1 "$@"; }
sql --command 'create table if not exists lab (id bigint primary key, content text not null)'
last=$(sql --command 'select coalesce(max(id), 0) from lab')
# Each row starts two programs, which an emulated guest pays for.
while sleep 1; do
    last=$((last + 1))
    echo "insert into lab values ($last, repeat(md5('$last'), 8)) returning id;"
done | sql | while read -r id; do
    echo "$id" >"$RUNTIME_DIRECTORY/new"
    mv "$RUNTIME_DIRECTORY/new" "$RUNTIME_DIRECTORY/acknowledged"
done
