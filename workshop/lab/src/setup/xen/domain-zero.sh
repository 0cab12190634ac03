#!/bin/sh
# /init of domain 0 on an emulated host. What differs between hosts is in /etc/lab/number.
export PATH=/usr/lib/xen-4.17/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/lock /run/xen /run/xenstored /run/droveway
number=$(cat /etc/lab/number)
hostname "xen$number"

# In an order that the kernel knows: each that fails is tried again after the others.
mkdir /tmp/left
ln -s /modules/*.ko /tmp/left/
for try in 1 2 3 4 5; do
    for module in /tmp/left/*.ko; do insmod "$module" 2>/dev/null && rm "$module"; done
done
mount -t xenfs xenfs /proc/xen

# Network cards have their numbers in their addresses: 0 is the lab's, the others are links.
ip link set lo up
for card in /sys/class/net/*; do
    read -r address <"$card/address"
    case $address in 52:54:00:00:0"$number":0*) nic=${address##*:0} ;; *) continue ;; esac
    ip link set "${card##*/}" name "nic$nic"
    if [ "$nic" = 0 ]; then
        ip address add 10.0.2.15/24 dev nic0
    else
        ip address add "10.9.$nic.$number/24" dev "nic$nic"
    fi
    ip link set "nic$nic" up
done

xenstored --pid-file /run/xen/xenstored.pid
until xenstore-read -s / >/dev/null 2>&1; do sleep 0.2; done
xen-init-dom0
xenconsoled --pid-file=/run/xen/xenconsoled.pid --log=guest --log-dir=/var/log/xen/console
echo "domain 0 of host $number is up"
while true; do xen-kit serve 5000; sleep 1; done
