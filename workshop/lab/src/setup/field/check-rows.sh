# check-rows NUMBER: fails unless the rows up to this number, and up to the last one that is known
# to be acknowledged, are in the guest's database as they were written. Prints the latter's number.
set -e
acknowledged=$(cat /run/lab-database/acknowledged)
fault=$(runuser -u postgres -- psql --no-psqlrc --tuples-only --no-align --command "
    with seen as (
        select count(*) as rows, coalesce(max(id), 0) as last,
            count(*) filter (where content <> repeat(md5(id::text), 8)) as wrong from lab)
    select rows || ' rows up to ' || last || ', ' || wrong || ' of them wrong' from seen
    where rows <> last or wrong > 0 or last < greatest($1, $acknowledged)")
if [ -n "$fault" ]; then
    echo "$acknowledged rows were acknowledged, and $1 before; there are $fault"
    exit 1
fi
echo "$acknowledged"
