# Runs in a host's mount namespace: gives the host its own /run, /etc and libvirt directories in
# /var, and libvirt itself. None of it is visible outside, and it goes with the namespace.
#
# Arguments: the host's own directory, QEMU's user, where the distribution's QEMU is to find its
# modules, libvirtd's cache of QEMU capabilities, libvirt's tree or nothing.
set -eu
own=$1 user=$2 modules=$3 capabilities=$4 tree=${5-}

# The host's own directory stays where it is.
mkdir "$own/run"
mount -n -t tmpfs -o mode=755 run "$own/run"
mkdir "$own/run/${own##*/}"
mount -n --rbind "$own" "$own/run/${own##*/}"
mount -n --move "$own/run" /run
# QEMU's user has to reach the host's sockets and kernels.
chmod 755 "$own"

# What is written to these directories stays in this host.
layer=/run/layers
for dir in /etc /var/lib /var/cache /var/log; do
    mkdir -p "$layer$dir/upper" "$layer$dir/work"
    mount -n -t overlay -o "lowerdir=$dir,upperdir=$layer$dir/upper,workdir=$layer$dir/work" \
        overlay "$dir"
done
# The machine may have VMs of its own.
for dir in /etc/libvirt /var/lib/libvirt /var/cache/libvirt /var/log/libvirt; do
    mkdir -p "$dir"
    mount -n -t tmpfs -o mode=755 libvirt "$dir"
done
mkdir /run/libvirt /run/lock

# All hosts of the lab have the same QEMUs, and probing one takes seconds.
mkdir -p /var/cache/libvirt/qemu/capabilities
mount -n --bind "$capabilities" /var/cache/libvirt/qemu/capabilities

if [ -n "$tree" ]; then
    for dir in bin sbin lib share; do
        [ -d "$tree/$dir" ] || continue
        mount -n -t overlay -o "lowerdir=$tree/$dir:/usr/$dir" overlay "/usr/$dir"
    done
fi

# All drivers but those that make networks or look for devices.
mkdir /run/drivers
for driver in qemu storage secret; do
    for dir in /usr/lib/*/libvirt/connection-driver /usr/lib*/libvirt/connection-driver; do
        file="$dir/libvirt_driver_$driver.so"
        [ ! -e "$file" ] || ln -sf "$file" /run/drivers/
    done
done

# libvirt has a QEMU load all its modules, and a QEMU that finds modules of another one exits. The
# system's QEMU finds its own by a variable. libvirtd's cache of capabilities stays valid as long as
# that directory has the same date.
mkdir "$modules" /run/empty
touch -d '2000-01-01 UTC' /run/empty
for dir in /usr/lib/*/qemu; do
    [ -d "$dir" ] || continue
    mount -n --bind "$dir" "$modules"
    mount -n --bind /run/empty "$dir"
done

# The driver doesn't start without this user, even if QEMU runs as another one.
grep -q '^libvirt-qemu:' /etc/group || echo 'libvirt-qemu:x:64055:' >> /etc/group
grep -q '^libvirt-qemu:' /etc/passwd ||
    echo 'libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin' >> /etc/passwd
id "$user" > /dev/null
# virt-handler gives sockets to a user of this name.
grep -q '^qemu:' /etc/passwd ||
    echo "qemu:x:$(id -u "$user"):$(id -g "$user")::/:/usr/sbin/nologin" >> /etc/passwd

# libvirt probes a QEMU as root. If QEMU's user may not use KVM, libvirt takes the result for
# outdated and probes again whenever it needs it. So then no user has KVM here.
if [ -e /dev/kvm ] && ! setpriv --reuid "$user" --regid "$user" --init-groups test -w /dev/kvm
then
    touch /run/no-kvm
    chmod 0 /run/no-kvm
    mount -n --bind /run/no-kvm /dev/kvm
fi
