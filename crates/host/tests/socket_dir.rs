//! A socket's directory whose process lacks descriptors. Alone in its process.

use std::fs;

use host::socket_dir::SocketDir;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn nothing_is_left_without_descriptors() {
    let parent = tempfile::tempdir().unwrap();
    let left = || fs::read_dir(parent.path()).unwrap().count();
    let (_listener, dir) = SocketDir::listen(parent.path(), "q-").unwrap();
    assert!(dir.socket().exists());
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..before }).unwrap();
    let refused = SocketDir::listen(parent.path(), "q-");
    drop(dir);
    setrlimit(Resource::Nofile, before).unwrap();
    refused.unwrap_err();
    assert_eq!(left(), 0);
}
