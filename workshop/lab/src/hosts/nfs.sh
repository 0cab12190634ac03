# Serves a directory by NFS at /mnt, until it is killed. Its arguments: that directory, where the
# programs are unpacked (or /), rpcbind, ganesha.nfsd, and its modules.
#
# It has mounts of its own: both programs have fixed paths below /run and /etc, where the machine
# may have the same programs at work. rpcbind becomes the user _rpc, which only installing it makes.
set -e
directory=$1 home=$2 rpcbind=$3 ganesha=$4 modules=$5
mount --bind "$directory" /mnt
mount -t tmpfs run /run
mkdir -p /run/rpcbind /run/lock /run/ganesha
cp -a /etc /run/etc
echo '_rpc:x:0:0::/:/bin/false' >>/run/etc/passwd
[ -e /etc/netconfig ] || cp "$home/etc/netconfig" /run/etc/netconfig
mount --bind /run/etc /etc
cat >/run/ganesha.conf <<CONF
NFS_CORE_PARAM {
    Protocols = 3; NFS_Port = 2049; MNT_Port = 20048; Enable_NLM = false; Enable_RQUOTA = false;
    Plugins_Dir = "$modules";
}
NFSv4 { UseGetpwnam = true; RecoveryRoot = "/run/ganesha"; }
NFS_KRB5 { Active_krb5 = false; }
EXPORT {
    Export_Id = 1; Path = /mnt; Pseudo = /mnt; Access_Type = RW; Squash = No_Root_Squash;
    Protocols = 3; Transports = TCP; SecType = sys;
    FSAL { Name = VFS; }
}
LOG { Default_Log_Level = EVENT; }
CONF
"$rpcbind" -f &
# It registers its ports there.
until [ -S /run/rpcbind.sock ]; do sleep 0.05; done
exec "$ganesha" -F -f /run/ganesha.conf -L /mnt/ganesha.log -p /run/ganesha.pid
