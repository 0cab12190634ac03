# Before 9.0 QEMU loses dirty pages under TCG if RAM is a multiple of 256 KiB, which
# is all that libvirt gives: the guest gets 8 KiB more.
previous=
for argument do
    shift
    case $previous in
    -m)
        size=${argument#size=}
        case $size in
        *k) argument="size=$((${size%k} + 8))k" ;;
        *[!0-9]*) ;;
        *) argument="size=$((size * 1024 + 8))k" ;;
        esac
        ;;
    esac
    previous=$argument
    case $argument in
    *'"id":"pc.ram"'*'"size":'*)
        before=${argument%%'"size":'*}
        size=${argument#*'"size":'}
        after=${size#"${size%%[!0-9]*}"}
        size=${size%"$after"}
        argument="$before\"size\":$((size + 8192))$after"
        ;;
    esac
    set -- "$@" "$argument"
done
