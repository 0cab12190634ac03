# check-rows NUMBER: fails unless the rows up to this number, and up to the last one that is known
# to be acknowledged, are in the guest's database as they were written. Prints the latter's number.
set -e
acknowledged=$(cat /run/lab-database/acknowledged)
fault=$(runuser -u postgres -- psql --no-psqlrc --tuples-only --no-align --command "
    with seen as (
        select count(*) as found, coalesce(max(id), 0) as newest,
            count(*) filter (where content <> repeat(md5(id::text), 8)) as wrong from lab)
    select found || ' rows up to ' || newest || ', ' || wrong || ' of them wrong' from seen
    where found <> newest or wrong > 0 or newest < greatest($1, $acknowledged)")
if [ -n "$fault" ]; then
    echo "$acknowledged rows were acknowledged, and $1 before; there are $fault"
    exit 1
fi
echo "$acknowledged"
